# SPDX-License-Identifier: Apache-2.0
"""Parts of the model -> cards. Imports no torch.

``roles`` says which part is on which cards; ``hosting`` what of that the host does by options, what this plugin adds
and where both depart from the map; ``visible`` which cards a process sees; ``fit`` what lies on each.
"""
