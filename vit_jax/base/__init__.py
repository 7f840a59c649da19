"""What every room uses: errors, files, and trees of parameters."""
