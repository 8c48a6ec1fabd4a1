"""MadPipe: stages on devices under a memory limit, one device with any number of stages, and a periodic schedule."""
