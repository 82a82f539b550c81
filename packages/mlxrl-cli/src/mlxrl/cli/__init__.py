"""mlxrl.cli"""
