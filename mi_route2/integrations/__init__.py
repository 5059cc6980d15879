"""Routes inside of other libraries' training loops. Each module needs an extra of its own and is imported by its name.

from mi_route2.integrations.trl import RoutedGRPOTrainer, RoutedSFTTrainer     # pip install "mi-route2[trl]"
"""
