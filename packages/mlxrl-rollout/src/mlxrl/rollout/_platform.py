"""The policy's package says in one sentence where MLX has no wheel; it must be the first to be imported."""

import mlxrl.policy  # noqa: F401
