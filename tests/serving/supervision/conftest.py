from transport_place import full_disk, make_bundle, place

__all__ = ["full_disk", "make_bundle", "place"]
