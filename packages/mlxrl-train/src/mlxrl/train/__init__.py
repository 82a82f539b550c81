"""mlxrl.train"""
