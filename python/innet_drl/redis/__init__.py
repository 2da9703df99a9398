"""A replay memory with Redis as the transport, the baseline of Furukawa and Matsutani (2022): `--replay redis://`.

| file | subject |
| --- | --- |
| `memory` | the memory of a run: in the learner, filled from Redis |
| `store` | the list of experience and the parameters on Redis |
| `client` | a client with the fastest settings, which the benchmarks use, too |
| `messages` | formats of the messages between actors and learner |

Needs the extra `redis`.
"""
