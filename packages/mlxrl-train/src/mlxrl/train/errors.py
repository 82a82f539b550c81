"""The errors of this package."""


class ConfigError(ValueError):
    """A config that cannot be run; the message names each field, its value, and what to set."""


class UnplannedError(ConfigError):
    """A config that can be run, of a model whose memory cannot be predicted; the message says why."""


class RunError(RuntimeError):
    """A run that cannot start, go on or be resumed; the message names the folder or file and what to do."""


class RunFolderError(RunError):
    """A run folder that cannot be used or resumed; nothing has run yet."""


class DynamicSamplingError(RunError):
    """Step after step no group had anything to teach; the message says how many and what to change."""


class RewardError(RunError):
    """Step after step a reward function failed on every row; the message names it and what it did."""
