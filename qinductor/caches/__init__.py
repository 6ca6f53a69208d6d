"""What is kept on disk for the next process."""
