"""mlxrl.rollout"""
