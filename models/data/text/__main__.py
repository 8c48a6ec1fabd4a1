"""Print the tokens of a text: `python -m models.data.text [FILE] [tokens=words]`.

Prints its tokens, the vocabulary that a model needs, and the unigram entropy: the loss of a model that knows only how
often each token comes. A model that has learned anything of the text is below.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.core.problem import CannotRun, refuse
from models.data.text.config import TOKENS, Config, check
from models.data.text.source import TOPICS

USAGE = f"usage: python -m models.data.text [FILE] [tokens={'|'.join(TOKENS)}]"


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0, or 2 for arguments or a text that cannot be used."""
    if arguments[:1] in (["--help"], ["-h"]):
        print(USAGE, __doc__, sep="\n\n", end="")
        return 0
    files = [argument for argument in arguments if not argument.startswith(("tokens=", "-"))]
    kinds = [argument.removeprefix("tokens=") for argument in arguments if argument.startswith("tokens=")]
    if len(files) > 1 or len(kinds) > 1 or len(files) + len(kinds) < len(arguments):
        print(USAGE, file=sys.stderr)
        return 2
    config = Config(file=files[0] if files else None, tokens=kinds[0] if kinds else "bytes")
    try:
        refuse(check(config), "this text")
        _show(config)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _show(config: Config) -> None:
    from models.data.text import corpus

    found = corpus.read(config.file, config.tokens)
    print(f"text              {TOPICS if config.file is None else config.file}")
    print(f"tokens            {len(found)} {config.tokens}")
    print(f"vocabulary        {found.vocabulary}")
    print(f"unigram entropy   {found.unigram_entropy():.4f} nats per token")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
