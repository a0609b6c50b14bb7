"""The cryptography the protocol stands on, all of it from the `cryptography` package.

Every key is used for one purpose, between two named clients, in one session: the purpose, the session and
both names enter its derivation.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fot.aggregation.codec import Segment, Words
from fot.aggregation.secure.wire import Refusal

_BLOCK = 1 << 15  # entries expanded at a time: the block and its mask stay in the cache of a core
_ZEROS = bytes(8 * _BLOCK)
_ANY = X25519PrivateKey.from_private_bytes(bytes(range(32)))  # no secret: it only tells keys from no keys


def private_key(secret: bytes) -> X25519PrivateKey:
    """The X25519 key of 32 secret bytes."""
    return X25519PrivateKey.from_private_bytes(secret)


def public_key(secret: bytes) -> bytes:
    """The 32 public bytes of a secret."""
    return private_key(secret).public_key().public_bytes_raw()


def agree(own: X25519PrivateKey, peer: bytes) -> bytes:
    """The secret that two clients share; keys that would make it constant are refused."""
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError as error:
        raise Refusal("a peer's public key is not a key") from error


def check_public(key: bytes) -> None:
    """Refuse a public key that makes any shared secret constant: no client could agree with its sender."""
    agree(_ANY, key)


def derive(secret: bytes, purpose: bytes, session: bytes, *clients: int) -> bytes:
    """A 32-byte key for one purpose."""
    info = b"fot secure sum 1 " + purpose + struct.pack(f"<{len(clients)}I", *clients)
    return HKDF(algorithm=SHA256(), length=32, salt=session, info=info).derive(secret)


def mask_key(secret: int, session: bytes, client: int) -> bytes:
    """The secret bytes of a client's mask key, from the 128 bits that are shared.

    Session and client enter, so that a search through all secrets serves against one client alone.
    """
    return derive(secret.to_bytes(16, "little"), b"key", session, client)


def self_seed(secret: int, session: bytes, client: int) -> bytes:
    """The seed of a client's self mask, from the 128 bits that are shared."""
    return derive(secret.to_bytes(16, "little"), b"self", session, client)


def pair_seed(secret: bytes, session: bytes, one: int, other: int) -> bytes:
    """The seed of the mask that `one` and `other` share, the same from both sides."""
    return derive(secret, b"mask", session, min(one, other), max(one, other))


def seal(secret: bytes, session: bytes, sender: int, receiver: int, shares: bytes) -> bytes:
    """Encrypt and authenticate what `sender` shares with `receiver`.

    The nonce is constant because the key, which names session, sender and receiver, encrypts once.
    """
    key = derive(secret, b"share", session, sender, receiver)
    return ChaCha20Poly1305(key).encrypt(bytes(12), shares, None)


def unseal(secret: bytes, session: bytes, sender: int, receiver: int, sealed: bytes) -> bytes:
    """Undo `seal`, or refuse what was not sealed by `sender` for `receiver` in this session."""
    key = derive(secret, b"share", session, sender, receiver)
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, None)
    except InvalidTag as error:
        raise Refusal(f"the shares from client {sender} are not authentic") from error


def expand(seed: bytes, length: int) -> bytes:
    """The first `length` bytes of the AES-256-CTR key stream of a seed."""
    return _stream(seed).update(bytes(length))


def add_masks(
    words: Sequence[Words], layout: Sequence[Segment], plus: Sequence[bytes], minus: Sequence[bytes]
) -> None:
    """Add and subtract the masks of seeds, in place, modulo the word size (hence modulo 2**bits).

    A mask is the seed's key stream read as little-endian words, segment after segment.
    """
    streams = [(np.add, _stream(seed)) for seed in plus] + [(np.subtract, _stream(seed)) for seed in minus]
    buffer = bytearray(8 * _BLOCK)
    for segment, (_, length) in zip(words, layout, strict=True):
        size = segment.dtype.itemsize
        mask = np.frombuffer(buffer, f"<u{size}")
        for start in range(0, length, _BLOCK):
            block = segment[start : start + _BLOCK]
            zeros = memoryview(_ZEROS)[: size * len(block)]
            part = mask[: len(block)]
            for operation, stream in streams:
                stream.update_into(zeros, buffer)
                operation(block, part, out=block)


def _stream(seed: bytes) -> CipherContext:
    return Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
