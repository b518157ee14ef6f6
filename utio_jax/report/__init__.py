# SPDX-License-Identifier: Apache-2.0
"""What `utio-jax bench` measured, as Markdown, CSV and one HTML page."""
