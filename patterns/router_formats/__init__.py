"""What a router computes, read off its behaviour."""
