"""transformers: an image-classification pipeline."""

import numpy as np
import torch
from PIL import Image
from telling import tell
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, pipeline

torch.manual_seed(0)
model = ViTForImageClassification(ViTConfig(num_labels=10)).eval()
classify = pipeline(
    "image-classification", model=model, image_processor=ViTImageProcessor(), device="cuda:0"
)
random = np.random.default_rng(0)
images = [Image.fromarray(random.integers(0, 255, (256, 256, 3), np.uint8)) for _ in range(40)]
found = [classify(image, top_k=10) for image in images]
tell(np.array([[one["score"] for one in answers] for answers in found]))
