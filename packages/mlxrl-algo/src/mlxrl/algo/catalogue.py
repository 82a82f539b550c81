"""The table of algorithms, written from the classes themselves."""

from dataclasses import fields

from mlxrl.algo.base import PolicyGradientAlgorithm
from mlxrl.algo.registry import algorithm_class, algorithm_names, algorithm_options


def algorithm_table() -> str:
    """Return a Markdown table of the registered algorithms that are made of presets.

    Returns:
        One row per algorithm: name, class, token loss, reduction, options with their defaults, source. Of the options
        that every algorithm has, only those with a default of the algorithm's own are shown.
    """
    shared = {item.name: item.default for item in fields(PolicyGradientAlgorithm)}
    lines = ["| name | class | token loss | reduction | options | source |", "|---|---|---|---|---|---|"]
    for name in algorithm_names():
        algorithm, options = algorithm_class(name), algorithm_options(name)
        if issubclass(algorithm, PolicyGradientAlgorithm):
            own = ", ".join(
                f"{option} {default}"
                for option, default in options.items()
                if option != "reduction" and (option not in shared or default != shared[option])
            )
            cells = (
                name,
                f"`{algorithm.__name__}`",
                f"`{algorithm.formula}`",
                options["reduction"].name,
                own,
                algorithm.source,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
