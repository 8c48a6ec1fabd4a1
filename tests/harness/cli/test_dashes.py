"""Options that do not exist are keys, typed with dashes."""

import pytest

from harness.cli.dashes import taken_away


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--engine gpipe --model unet", "engine=gpipe model=unet"),
        ("-engine=gpipe steps=3", "engine=gpipe steps=3"),
        ("--overwrite --steps 3", "overwrite=true steps=3"),
        ("--optimizer.lr -0.1", "optimizer.lr=-0.1"),
        ("-m --config-dir own --engine gpipe,ddp", "-m --config-dir own engine=gpipe,ddp"),
        ("--gpus 3", "cluster.devices=3"),
        ("--micro-batch-size 2 --engine gpipe", "engine=gpipe batch.micro_batch_size=2"),
        ("-m --micro-batch-size 2 --engine gpipe,ddp", "-m micro_batch_size=2 engine=gpipe,ddp"),
    ],
)
def test_taken_away(typed: str, meant: str) -> None:
    arguments = typed.split()
    unknown = [text for text in arguments if text.startswith("-") and text not in ("-m", "--config-dir", "-0.1")]
    assert taken_away(arguments, unknown) == meant.split()
