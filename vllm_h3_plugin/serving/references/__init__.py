# SPDX-License-Identifier: Apache-2.0
"""Pictures, films and sounds that come with a request: fetched, told by their bytes, checked, made plain.

Nothing here trusts a name or a content type, decodes before sizes are known, or connects to an address that was not
checked. Imports no torch.
"""
