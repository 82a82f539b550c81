"""mlxrl.env"""
