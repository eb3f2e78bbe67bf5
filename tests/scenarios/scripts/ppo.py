"""PPO: a rollout in a toy environment, then several epochs of clipped updates on shuffled minibatches."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import trainfit


class ActorCritic(nn.Module):
    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(observations, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.policy = nn.Linear(64, actions)
        self.value = nn.Linear(64, 1)

    def forward(self, observation: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        hidden = self.body(observation)
        return Categorical(logits=self.policy(hidden)), self.value(hidden).squeeze(-1)


class ToyEnvironment:
    """Eight copies of a game that pays for the action that the observation names."""

    def __init__(self, copies: int = 8) -> None:
        self.random = np.random.default_rng(0)
        self.copies = copies

    def observe(self) -> np.ndarray:
        return self.random.standard_normal((self.copies, 12)).astype(np.float32)

    def reward(self, actions: np.ndarray) -> np.ndarray:
        return (actions == 1).astype(np.float32)


def build(device: str = "cpu") -> trainfit.Step:
    agent = ActorCritic(12, 4).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    environment = ToyEnvironment()
    horizon, minibatch = 16, 32

    def run() -> float:
        observations, actions, old_log_probs, rewards, values = [], [], [], [], []
        for _ in range(horizon):
            observation = torch.from_numpy(environment.observe()).to(device)
            with torch.no_grad():
                policy, value = agent(observation)
                action = policy.sample()
            observations.append(observation)
            actions.append(action)
            old_log_probs.append(policy.log_prob(action))
            rewards.append(torch.from_numpy(environment.reward(action.cpu().numpy())).to(device))
            values.append(value)
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        advantages = (returns - torch.stack(values)).flatten()
        flat = [torch.cat(x) for x in (observations, actions, old_log_probs)]
        returns = returns.flatten()
        for _ in range(2):
            order = np.random.permutation(horizon * environment.copies)
            for start in range(0, len(order), minibatch):
                rows = torch.as_tensor(order[start : start + minibatch], device=device)
                policy, value = agent(flat[0][rows])
                ratio = (policy.log_prob(flat[1][rows]) - flat[2][rows]).exp()
                advantage = advantages[rows]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
                loss = (
                    policy_loss + 0.5 * (value - returns[rows]).pow(2).mean() - 0.01 * policy.entropy().mean()
                )
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        return loss.item()

    return trainfit.Step(agent, optimizer, run)
