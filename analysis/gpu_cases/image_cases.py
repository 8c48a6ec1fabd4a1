"""Published training speeds of convolutional nets: image_cases.csv, of which half are held back from every fit.

nvidia-pytorch     ResNet-50 v1.5, one GPU and eight with DDP, on V100 (16 GB) and A100 (80 GB), containers of 21.03:
                   NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md at 291f0d02;
                   batches by configs.yml there
nvidia-mxnet       the same in MXNet with Horovod, 20.12: MxNet/Classification/RN50v1.5/README.md at 134510b4
nvidia-tensorflow  the same in TensorFlow with XLA, 20.06, A100 with 40 GB: TensorFlow/Classification/ConvNets/
                   resnet50v1.5/README.md at 1d4211fe
mxnet              Inception-v3 and ResNet-50, batches of 1 to 128, one V100 (p3.2xlarge), MXNet 1.2: apache/mxnet,
                   docs/faq/perf.md at 054aeee5, "Training results"
tensorflow         Inception-v3, ResNet-50 and ResNet-152, one P100 of a DGX-1, synthetic data, May 2017:
                   tensorflow/tensorflow, docs_src/performance/benchmarks.md at 5984ffef. Its VGG16 and AlexNet are no
                   models here, and with several GPUs it has parameter servers
paik               ResNet-152, V100 (16 GB) and A100 (80 GB), one GPU and eight with DDP (by the printed efficiency):
                   W. Paik, pytorch-ddp-bench (theloginnode.com, HPC special topics 2)

Those of DGX-2 are left out: its V100 are another card (SXM3). `batch` is in images of one GPU, `images_s` of all GPUs.
`precision` is the format of the matmuls; weights of mixed precision, in float32, count as if they were in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas

from analysis.gpu_cases.cases import is_held_back

FILE = Path(__file__).with_name("image_cases.csv")


@dataclass(frozen=True)
class ImageCase:
    """One published run: a replica of the model on each GPU."""

    name: str
    publication: str
    gpu: str
    devices: int
    model: str
    batch: int
    precision: str
    images_s: float

    @property
    def held_back(self) -> bool:
        """Whether no constant may be fitted to it."""
        return is_held_back(self.name)

    @property
    def is_fitted(self) -> bool:
        """Whether numbers are fitted to it."""
        return not self.held_back

    @property
    def step_s(self) -> float:
        """Measured seconds of a step."""
        return self.batch * self.devices / self.images_s


def load() -> list[ImageCase]:
    """Returns all cases, in the order of the file."""
    return [ImageCase(**row) for row in pandas.read_csv(FILE).to_dict("records")]
