"""Whether equal starts receive equal gradients, of lanes and of this project's adapters, and gradients by path."""
