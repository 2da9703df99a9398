"""A replay memory with Redis as the transport, the baseline of Furukawa and Matsutani (2022): `--replay redis://`.

Needs the extra `redis`.
"""
