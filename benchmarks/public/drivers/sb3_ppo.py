"""PPO and DQN of stable-baselines3 on CartPole."""

import torch
from stable_baselines3 import DQN, PPO

ppo = PPO("MlpPolicy", "CartPole-v1", n_steps=128, seed=0, device="cpu").learn(512)
dqn = DQN("MlpPolicy", "CartPole-v1", learning_starts=64, seed=0, device="cpu").learn(300)
for agent in (ppo, dqn):
    print(torch.cat([p.detach().flatten() for p in agent.policy.parameters()]).sum().item().hex())
    torch.save(agent.policy.state_dict(), f"{type(agent).__name__}.pt")
