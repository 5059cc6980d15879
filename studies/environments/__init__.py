"""Environments whose graders have loopholes: the protocol, the micro world, LeetCode, and any problem with a chat model."""
