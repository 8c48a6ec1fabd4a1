"""Published training speeds of GPUs against the simulator's, and the efficiencies that are fitted to half of them."""
