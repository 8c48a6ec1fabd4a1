"""Texts of parameters, in the three styles that are used."""

import pytest

from harness.user_model import docstring

GOOGLE = """What it makes,
    in two lines.

    More.

    Args:
        width (int, optional): Numbers
            of a layer: many.
        depth: Layers.

        *others: Anything.

    Returns:
        A thing: not a parameter.
    """
NUMPY = """What it makes, in two lines.

    Parameters
    ----------
    width : int, default 3
        Numbers
        of a layer: many.
    depth, height
        Layers.

    Returns
    -------
    thing : int
        Not a parameter.
    """
SPHINX = """What it makes, in two lines.

    :param int width: Numbers
        of a layer: many.
    :param depth: Layers.
    :type depth: int
    :returns: nothing
    """


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX])
def test_parameters(text: str) -> None:
    found = docstring.parameters(text)
    assert (found["width"], found["depth"]) == ("Numbers of a layer: many.", "Layers.")
    assert not {"Returns", "thing", "A", "returns", "type"} & {*found}
    assert docstring.first_line(text) == "What it makes, in two lines."


@pytest.mark.parametrize("text", [None, "", "Args:", "Args:\n", "Parameters\n----------", ":param x", "One line."])
def test_without_any(text: str | None) -> None:
    assert docstring.parameters(text) == {}
