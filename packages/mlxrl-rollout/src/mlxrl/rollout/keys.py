"""Random keys that depend on what is drawn, never on when or beside what."""

import hashlib
import struct


def derive_key(*parts: int) -> int:
    """A 64-bit key from integers such as (seed, step, group, sample); any change of any part gives another key."""
    try:
        packed = b"".join(struct.pack("<q", part) for part in parts)
    except struct.error as error:
        raise ValueError(f"seed, step, group and sample must be whole numbers of 64 bits, got {parts}.") from error
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def derive_seed(*parts: int) -> int:
    """A non-negative 31-bit seed, for code that takes an ordinary integer."""
    return derive_key(*parts) & 0x7FFFFFFF
