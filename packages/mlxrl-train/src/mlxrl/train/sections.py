"""What every table of the config has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the config: unknown keys, wrong types, NaN and infinities are refused."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )
