"""The boards, their firmware images, and how they are flashed or simulated."""
