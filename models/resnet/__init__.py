"""ResNet with bottlenecks: `config.py` holds its keys, `resnet.py` the network."""
