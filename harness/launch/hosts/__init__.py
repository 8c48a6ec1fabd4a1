"""Starts the ranks over ssh, on the hosts of `launch.hosts`, and ends all when the first one fails."""
