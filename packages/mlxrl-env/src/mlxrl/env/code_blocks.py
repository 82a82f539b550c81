"""Finding the block of code in a text."""

from __future__ import annotations

import re

_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


def last_block(text: str) -> str:
    """The inside of the last block between ``` fences, or the whole text where there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text
