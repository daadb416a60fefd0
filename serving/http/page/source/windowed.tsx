/** Content that is in the document only while it is near the window, so that long transcripts have a bounded size.
 *
 * A block that is far away is an empty one of the height that it had, or of an estimate. One block may be pinned by
 * `always`: the last turns of a conversation, or what has the focus. In one frame as many blocks appear as `BUDGET`
 * allows, those that are nearest to the window first, so that scrolling waits for no more than these.
 */

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

const MARGIN = "1500px";
const BUDGET = 300; // elements that appear in one frame; a larger block appears alone

interface Props {
  estimate: number; // pixels
  cost: number; // elements, roughly
  always?: boolean;
  class?: string;
  children: () => ComponentChildren;
}

interface Block {
  cost: number;
  shown: boolean;
  show: (near: boolean, height: number) => void;
}

const blocks = new WeakMap<Element, Block>();
const moved = new Map<Element, IntersectionObserverEntry>(); // what waits for a frame, by its newest position
let observer: IntersectionObserver | undefined;

function observed(element: Element, block: Block): () => void {
  observer ??= new IntersectionObserver(
    (entries) => {
      if (!moved.size) requestAnimationFrame(work);
      for (const entry of entries) moved.set(entry.target, entry);
    },
    { rootMargin: MARGIN },
  );
  blocks.set(element, block);
  observer.observe(element);
  return () => {
    observer?.unobserve(element);
    moved.delete(element);
  };
}

function work(): void {
  const distances = [...moved].map(([element, entry]) => ({ element, entry, away: distance(element) }));
  let left = BUDGET;
  for (const { element, entry } of distances.toSorted((a, b) => a.away - b.away)) {
    const block = blocks.get(element);
    const appears = block !== undefined && entry.isIntersecting && !block.shown;
    if (appears && left < BUDGET && block.cost > left) continue;
    if (appears) left -= block.cost;
    moved.delete(element);
    if (block === undefined || block.shown === entry.isIntersecting) continue;
    block.shown = entry.isIntersecting;
    block.show(entry.isIntersecting, entry.boundingClientRect.height);
  }
  if (moved.size) requestAnimationFrame(work);
}

/** Return how far a block is from the middle of the window. */
function distance(element: Element): number {
  const { top, bottom } = element.getBoundingClientRect();
  const middle = innerHeight / 2;
  return Math.max(top - middle, middle - bottom, 0);
}

export function Windowed({ estimate, cost, always = false, class: name, children }: Props) {
  const block = useRef<HTMLDivElement>(null);
  const height = useRef(estimate);
  const [near, set] = useState(false);
  useEffect(() => {
    const element = block.current;
    if (element === null) return;
    const show = (isNear: boolean, was: number) => {
      if (!isNear && element.childElementCount) height.current = was;
      set(isNear || element.contains(document.activeElement));
    };
    return observed(element, { cost, shown: false, show });
  }, []);
  const shown = near || always;
  useEffect(() => {
    const style = block.current?.style;
    if (style) style.minHeight = shown ? "" : `${height.current}px`;
  }, [shown]);
  return (
    <div ref={block} class={name}>
      {shown && children()}
    </div>
  );
}
