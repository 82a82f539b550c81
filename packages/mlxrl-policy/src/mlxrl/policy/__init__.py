"""mlxrl.policy"""
