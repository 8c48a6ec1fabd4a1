"""What engines build on: sessions, CPU streams, memory metering, collectives, tied weights. Imports torch."""
