/** Images of a message: read from files into data URLs, shown on a canvas, because the page may load no other images. */

import { useEffect, useRef } from "preact/hooks";

const MAX_BYTES = 8 * 2 ** 20;

/** Return the files as data URLs. Throws, in words, for a file that is no image or too large. */
export async function readImages(files: Iterable<File>): Promise<string[]> {
  return Promise.all([...files].map(readImage));
}

async function readImage(file: File): Promise<string> {
  if (!file.type.startsWith("image/")) throw new Error(`${file.name} is not an image.`);
  if (file.size > MAX_BYTES) throw new Error(`${file.name} is larger than ${MAX_BYTES / 2 ** 20} MiB.`);
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

function blobOf(url: string): Blob {
  const [, kind = "", data = ""] = /^data:([^;,]+);base64,(.*)$/s.exec(url) ?? [];
  return new Blob([Uint8Array.from(atob(data), (one) => one.charCodeAt(0))], { type: kind });
}

export function Thumbnail({ url, label }: { url: string; label: string }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    void draw(canvas.current, url);
  }, [url]);
  return <canvas ref={canvas} class="thumbnail" role="img" aria-label={label} width={96} height={96} />;
}

async function draw(canvas: HTMLCanvasElement | null, url: string): Promise<void> {
  const context = canvas?.getContext("2d");
  if (!canvas || !context) return;
  try {
    const image = await createImageBitmap(blobOf(url));
    const scale = Math.min(canvas.width / image.width, canvas.height / image.height);
    const [width, height] = [image.width * scale, image.height * scale];
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
    image.close();
  } catch {
    // a kind of image that the browser cannot draw: its label says what it is
  }
}
