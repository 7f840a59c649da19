"""Base of every room: errors, files, and trees of parameters."""
