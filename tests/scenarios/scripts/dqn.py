"""DQN: epsilon-greedy actions, a replay buffer in a deque, a target network updated now and then."""

import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

import trainfit

BATCH, GAMMA, EPSILON = 32, 0.99, 0.1


def q_network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def build(device: str = "cpu") -> trainfit.Step:
    random.seed(0)
    policy, target = q_network().to(device), q_network().to(device)
    target.load_state_dict(policy.state_dict())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, amsgrad=True)
    memory: deque[tuple] = deque(maxlen=200)
    for _ in range(200):  # random play fills the memory
        memory.append((torch.randn(8), random.randrange(4), random.random(), torch.randn(8)))
    state = torch.randn(8)
    steps = 0

    def run() -> torch.Tensor:
        nonlocal state, steps
        steps += 1
        if random.random() < EPSILON:
            action = random.randrange(4)
        else:
            with torch.no_grad():
                action = int(policy(state.to(device).unsqueeze(0)).argmax(1))
        next_state = torch.randn(8)
        memory.append((state, action, 1.0 if action == 0 else 0.0, next_state))
        state = next_state

        states, actions, rewards, next_states = zip(*random.sample(memory, BATCH))
        states, next_states = torch.stack(states).to(device), torch.stack(next_states).to(device)
        actions = torch.tensor(actions, device=device).unsqueeze(1)
        rewards = torch.tensor(rewards, device=device)
        q = policy(states).gather(1, actions).squeeze(1)
        with torch.no_grad():
            expected = rewards + GAMMA * target(next_states).max(1).values
        loss = F.smooth_l1_loss(q, expected)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()
        if steps % 100 == 0:
            target.load_state_dict(policy.state_dict())
        return loss

    return trainfit.Step(policy, optimizer, run)
