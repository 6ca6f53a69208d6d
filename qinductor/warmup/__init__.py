"""What makes a model ready to serve: caches on disk, and what warm-up runs."""
