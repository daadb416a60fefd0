/** Content that is in the document only while it is near the window, so that long transcripts have a bounded size.
 *
 * A block that is far away is an empty one of the height that it had, or of an estimate. One block may be pinned by
 * `always`: the last turns of a conversation, or what has the focus.
 */

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

const MARGIN = "1500px";

interface Props {
  estimate: number; // pixels
  always?: boolean;
  class?: string;
  children: () => ComponentChildren;
}

const shows = new WeakMap<Element, (near: boolean) => void>();
let observer: IntersectionObserver | undefined;

function observed(element: Element, show: (near: boolean) => void): () => void {
  observer ??= new IntersectionObserver(
    (entries) => entries.forEach((entry) => shows.get(entry.target)?.(entry.isIntersecting)),
    { rootMargin: MARGIN },
  );
  shows.set(element, show);
  observer.observe(element);
  return () => observer?.unobserve(element);
}

export function Windowed({ estimate, always = false, class: name, children }: Props) {
  const block = useRef<HTMLDivElement>(null);
  const height = useRef(estimate);
  const [near, set] = useState(false);
  useEffect(() => {
    const element = block.current;
    if (element === null) return;
    return observed(element, (isNear) => {
      if (!isNear && element.childElementCount) height.current = element.offsetHeight;
      set(isNear || element.contains(document.activeElement));
    });
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
