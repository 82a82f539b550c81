"""mlxrl.algo"""
