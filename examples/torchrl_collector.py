"""TorchRL's collectors, each in a process of its own, fill a buffer at a server; DQN learns CartPole from it.

pip install '.[torchrl]' gymnasium           # in a checkout
python examples/torchrl_collector.py         # until ten greedy games reach 300 on average, about a minute
"""

import argparse
import multiprocessing
import time

import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import OneHot
from torchrl.envs import GymEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

import innet_drl as innet
from innet_drl.torchrl import InnetReplayBuffer

GAME, POLICY, COLLECTORS, FRAMES, BATCH_SIZE = "CartPole-v1", "policy", 2, 64, 128


def make_actor() -> QValueActor:
    """A network, which chooses the best action."""
    network = MLP(in_features=4, out_features=2, num_cells=[128, 128])
    return QValueActor(network, in_keys=["observation"], spec=OneHot(2))


def make_buffer(address: str) -> InnetReplayBuffer:
    """The buffer, the same in all processes. They wait for each other, so that a step is sampled eight times."""
    return InnetReplayBuffer(50_000, batch_size=BATCH_SIZE, address=address, samples_per_insert=8.0)


def run_collector(address: str, seed: int) -> None:
    """Plays with the newest network, until the learner ends it."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    actor, buffer = make_actor(), make_buffer(address)
    explore = EGreedyModule(actor.spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=5_000)
    policy = TensorDictSequential(actor, explore)
    with innet.connect(address) as server:
        frames = {"frames_per_batch": FRAMES, "total_frames": -1}
        for data in Collector(lambda: GymEnv(GAME), policy, auto_register_policy_transforms=True, **frames):
            buffer.extend(data.reshape(-1))
            explore.step(FRAMES)
            if newest := server.get_parameters(POLICY, device="cpu"):
                actor.load_state_dict(newest.tensors)


def evaluate(actor: QValueActor, games: int = 10) -> float:
    """Mean score of greedy games."""
    with torch.no_grad():
        return sum(len(GymEnv(GAME).rollout(500, actor)) for _ in range(games)) / games


def main() -> None:
    """Learns, and prints the mean score of ten greedy games every 500 updates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=10_000, help="updates at most")
    parser.add_argument("--goal", type=float, default=300.0, help="mean score at which it ends")
    flags = parser.parse_args()
    torch.set_num_threads(1)  # more threads than one cost time with a network this small
    actor, start = make_actor(), time.monotonic()
    loss = DQNLoss(actor, loss_function="smooth_l1", double_dqn=True, reduction="none")
    loss.make_value_estimator(gamma=0.99)
    target, optimizer = SoftUpdate(loss, tau=0.01), torch.optim.Adam(loss.parameters(), 1e-3)
    with innet.Memory() as memory, memory.serve("innet://127.0.0.1:0") as server:
        memory.put_parameters(POLICY, actor.state_dict())
        address, context = server.addresses[0], multiprocessing.get_context("spawn")
        arguments = [(address, seed) for seed in range(COLLECTORS)]
        collectors = [context.Process(target=run_collector, args=each, daemon=True) for each in arguments]
        for collector in collectors:
            collector.start()
        buffer = make_buffer(address)
        for update in range(1, flags.updates + 1):
            batch = buffer.sample()
            # DQNLoss sets `td_error`; the weights correct for the items that are sampled more often.
            (batch["priority_weight"] * loss(batch)["loss"]).mean().backward()
            buffer.update_tensordict_priority(batch)
            torch.nn.utils.clip_grad_norm_(loss.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
            target.step()
            if update % 20 == 0:
                memory.put_parameters(POLICY, actor.state_dict())
            if update % 500 == 0:
                score = evaluate(actor)
                print(f"update {update:6}: mean score of 10 greedy games {score:.1f}, {time.monotonic() - start:.0f} s")
                if score >= flags.goal:
                    break
        for collector in collectors:
            collector.terminate()


if __name__ == "__main__":
    main()
