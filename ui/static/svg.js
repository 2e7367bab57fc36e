// Drawing: SVG elements by our own hands, and scales with round ticks.

const SVG = "http://www.w3.org/2000/svg";

/** svg("rect", {x: 1, class: "y"}, child, "text"): an SVG element. */
export function svg(tag, properties = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Round numbers from 0 to `most`, about `wanted` of them. */
export function ticks(most, wanted) {
  if (!(most > 0)) return [0];
  const rough = most / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, index) => Number((index * step).toPrecision(12)));
}

/** 0.1234 → "0.12", 12.34 → "12.3", 1234 → "1,234" */
export function figure(number) {
  const digits = number >= 100 ? 0 : number >= 10 ? 1 : 2;
  return number.toLocaleString("en-US", { maximumFractionDigits: digits });
}

/** Redraw when the element's width changes; returns what ends that. */
export function onResize(element, draw) {
  let width = 0;
  const observer = new ResizeObserver(() => {
    if (element.clientWidth === width) return;
    width = element.clientWidth;
    draw();
  });
  observer.observe(element);
  return () => observer.disconnect();
}
