"""Image files as data: their formats, folders of classes, and lists of files and labels."""
