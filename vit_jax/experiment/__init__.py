"""From a resolved config to a compiled training step."""
