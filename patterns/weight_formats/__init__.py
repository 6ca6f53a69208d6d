"""What a weight's region computes: its format, read off probes and proved equal to it."""
