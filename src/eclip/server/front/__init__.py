"""A front: requests queue here, are batched, and handed to the device process."""
