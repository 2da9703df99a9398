"""`innet-drl bench`: measurements that a user can repeat with the package alone.

`paper` is the evaluation of Furukawa and Matsutani (2022): `settings.py` says what is measured, `scene.py` has the
frames, `systems.py` the three systems as an actor and the learner use them, `roles.py` their processes and clocks,
`services.py` the servers, `paper.py` the command, `figures.py` what it prints and draws.

`gradients` is the evaluation of iSwitch (Li et al., ISCA 2019): `gradients.py` the sums, `reward.py` a real training.
Both use `crew.py`, processes that talk over pipes, and `results.py`, the file that is left.
"""
