"""Files of a run as tests read them."""

import json


def lines(path):
    """The objects of a file; NaN and Infinity, which are no JSON, are refused."""

    def refuse(constant):
        raise AssertionError(f"{path} has {constant}, which is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
