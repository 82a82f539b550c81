"""mlxrl.memory"""
