"""The asynchronous laboratory: what delays of gradients do to training, and what makes up for them."""
