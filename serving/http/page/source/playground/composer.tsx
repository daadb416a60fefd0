/** The box in which a message is written, with the images that were dropped, pasted or chosen. */

import { useState } from "preact/hooks";

import { messageOf } from "../api";
import { namesOf } from "../models";
import { say } from "../status";
import { ask, numRunning, stop } from "./chat";
import { composed, current } from "./conversation";
import { Thumbnail, readImages } from "./images";

export function Composer() {
  const text = composed.value;
  const [images, setImages] = useState<string[]>([]);
  const [problem, setProblem] = useState("");
  const [over, setOver] = useState(false);
  const running = numRunning.value > 0;
  const { task } = current.value;
  const ready = !running && namesOf(task).length > 0;
  const takesImages = task === "chat";
  const send = () => {
    if (!ready || !(text.trim() || images.length)) return;
    ask(text, takesImages ? images : []);
    composed.value = "";
    setImages([]);
  };
  const add = async (files: Iterable<File>) => {
    try {
      const found = await readImages(files);
      setImages((known) => [...known, ...found]);
      setProblem("");
      say(found.length === 1 ? "An image is added." : `${found.length} images are added.`);
    } catch (error) {
      setProblem(messageOf(error));
    }
  };
  const dropped = (event: DragEvent) => {
    setOver(false);
    if (!takesImages || !event.dataTransfer?.files.length) return;
    event.preventDefault();
    void add(event.dataTransfer.files);
  };
  return (
    <form
      class={over ? "composer over" : "composer"}
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
      onDragOver={(event) => {
        if (!takesImages || !event.dataTransfer?.types.includes("Files")) return;
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={() => setOver(false)}
      onDrop={dropped}
    >
      <label for="message">{takesImages ? "Message" : "Prompt"}</label>
      <textarea
        id="message"
        rows={3}
        dir="auto"
        value={text}
        aria-describedby="message-hint"
        onInput={(event) => (composed.value = event.currentTarget.value)}
        onPaste={(event) => {
          const files = event.clipboardData?.files;
          if (!takesImages || !files?.length) return;
          event.preventDefault();
          void add(files);
        }}
        onKeyDown={(event) => {
          if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
          event.preventDefault();
          send();
        }}
      />
      {takesImages && images.length > 0 && (
        <ul class="thumbnails" aria-label="Images of the message">
          {images.map((url, index) => (
            <li key={index}>
              <Thumbnail url={url} label={`Image ${index + 1}`} />
              <button
                type="button"
                aria-label={`Remove image ${index + 1}`}
                onClick={() => setImages(images.filter((_, place) => place !== index))}
              >
                <span aria-hidden="true">×</span>
              </button>
            </li>
          ))}
        </ul>
      )}
      {problem && (
        <p class="error">{problem}</p>
      )}
      <div class="actions">
        <button type="submit" class="primary" disabled={!ready}>
          Send
        </button>
        <button type="button" disabled={!running} onClick={() => stop()}>
          Stop all
        </button>
        {takesImages && (
          <label class="file">
            Add images
            <input
              type="file"
              accept="image/*"
              multiple
              onChange={(event) => {
                void add([...(event.currentTarget.files ?? [])]);
                event.currentTarget.value = "";
              }}
            />
          </label>
        )}
        <span id="message-hint" class="note">
          Enter sends, Shift+Enter begins a new line{takesImages && "; images can be dropped or pasted"}.
        </span>
      </div>
    </form>
  );
}
