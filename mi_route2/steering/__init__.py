"""Reading and acting at named places of a forward pass."""
