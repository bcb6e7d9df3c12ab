"""What train.py calls, one noun a file."""
